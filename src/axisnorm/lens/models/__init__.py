"""How a model is read and run, and what is found in it."""
