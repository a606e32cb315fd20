"""The orchestrator's inside: requests, scheduling, block tables, text and streams. Knows nothing of Triton."""
