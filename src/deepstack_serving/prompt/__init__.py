"""From what a client sends to the token ids that a model sees: chat messages, templates, placeholders."""
