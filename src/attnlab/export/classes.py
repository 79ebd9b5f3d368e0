"""The classes in the config of an exported model, by name; an exported folder has those of its model alone."""

from attnlab import attention, models

CLASSES: dict[str, type] = {
    name: cls for package in (attention, models) for name, cls in vars(package).items() if isinstance(cls, type)
}
