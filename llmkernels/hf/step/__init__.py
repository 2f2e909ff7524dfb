"""The decode step: a description of a model becomes launches, recorded and replayed as CUDA graphs."""
