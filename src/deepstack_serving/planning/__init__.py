"""What a checkpoint's config alone says of a deployment: bytes, tensors, and the split that balances them."""

GIBIBYTE = 1 << 30
