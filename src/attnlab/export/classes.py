"""The classes that the config of an exported model may name, by name.

An exported folder has a file of this name too, with the classes of its own model alone.
"""

from attnlab import attention, models

CLASSES: dict[str, type] = {
    name: cls
    for package in (attention, models)
    for name in package.__all__
    if isinstance(cls := getattr(package, name), type)
}
