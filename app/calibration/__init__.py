"""How far the probabilities of choices can be trusted: fitted to labelled pictures, told, drawn and kept."""
