"""Types with bounds of annotated_types, which :mod:`attnlab.config.nodes` checks. Other types accept all but null."""

from typing import Annotated

from annotated_types import Ge, Le, Lt

Size = Annotated[int, Ge(1), Le(1_048_576)]  # those of attention/bounds.py, which imports torch
SizeOrZero = Annotated[int, Ge(0), Le(1_048_576)]
Rank = Annotated[int, Ge(1), Le(65536)]
Layers = Annotated[int, Ge(1), Le(1024)]
Rate = Annotated[float, Ge(0), Lt(1)]  # of dropout
