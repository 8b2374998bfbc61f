"""A server for transformers models: continuous batching behind OpenAI's interface (docs/serving.md)."""
