"""Beam search and sampling. They use caches only through the interface of `Cache`."""

from attnlab.decoding.beam import BeamSearch, Decodable, Hypothesis, Steps
from attnlab.decoding.sampling import Continuable, Sampling
