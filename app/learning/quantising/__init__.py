"""`quantize --calibrate`: rounds weights, or chooses scales of inputs, for the inputs that sample pictures give."""
