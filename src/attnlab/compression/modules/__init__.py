"""The modules that compression puts in place of a model's own."""
