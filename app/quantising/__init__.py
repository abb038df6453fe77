"""`quantize --calibrate`: rounds weights so that layers' outputs change little for the inputs from sample pictures."""
