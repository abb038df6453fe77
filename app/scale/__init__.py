"""Jobs over many machines, by Ray. Imports of Ray happen inside functions."""
