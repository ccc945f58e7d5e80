"""The data of a training: loaders, preloading, validation, and objects that a program has."""
