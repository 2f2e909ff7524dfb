"""KV caches: ours of buffers and of pages, and those of transformers that become one of ours."""
