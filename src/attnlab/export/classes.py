"""The classes in the config of an exported model, by name; an exported folder has those of its model alone."""

from attnlab import attention, models

CLASSES: dict[str, type] = {
    name: cls
    for package in (attention, models)
    for name in package.__all__
    if isinstance(cls := getattr(package, name), type)
}
