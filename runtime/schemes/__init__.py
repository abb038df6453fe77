"""Number formats of linear weights: packing, scales and dequantisation."""
