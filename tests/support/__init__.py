"""What several tests share: tiny checkpoints, the stages in one process, a transformers reference."""
