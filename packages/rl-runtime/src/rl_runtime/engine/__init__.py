"""SGLang servers: starting them, talking to them, ending them."""
