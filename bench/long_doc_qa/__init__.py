"""Questions about long documents, answered by real vLLM: restored at once, and chunk by chunk."""
