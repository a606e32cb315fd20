"""The demo checkpoint: how its pictures are made, how it was trained and how well it reads.

Nothing in the path of a request imports this package; the server only reads demo/checkpoints/.
"""
