"""`quantize --calibrate`: rounds weights such that the outputs of layers stay, for the inputs that pictures give."""
