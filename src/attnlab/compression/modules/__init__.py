"""The modules that compression puts in place of those of a model."""
