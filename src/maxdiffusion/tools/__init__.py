"""What is said about a model or a job without running it."""
