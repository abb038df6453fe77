"""How good answers are: figures with intervals, two models beside each other, reports. Loads no model."""
