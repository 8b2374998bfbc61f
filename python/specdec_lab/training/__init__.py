"""Training of the models in python/models: corpus, tokenizer, target, and the drafters distilled from it."""
