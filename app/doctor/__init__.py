"""What is wrong with a model, an exported encoder or this machine, said before it is used."""
