"""What training leaves at each party: models, checkpoints and what can be read from them."""
