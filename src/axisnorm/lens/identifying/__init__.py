"""How an input and an output tell which normalization was computed."""
