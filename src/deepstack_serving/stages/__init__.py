"""What runs inside a stage process: the vision encoder and one slice of the language model."""
