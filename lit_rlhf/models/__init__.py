"""From a Hugging Face name or folder to a policy, a reference and a tokenizer."""
