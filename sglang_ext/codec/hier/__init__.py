"""The codec `hier` and the profile of a model that it codes with."""
