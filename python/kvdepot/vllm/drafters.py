"""KV groups with the layers of a drafter (EAGLE, MTP), of which vLLM drops the last block it finds.

The hit then ends one block earlier in every group. Of sliding windows vLLM stores, by default, only
the blocks that a hit needs which ends with the prompt's last full block: with a drafter, that is a
hit which never happens, and the prompt would be computed as a whole each time.
"""

from __future__ import annotations

from typing import Any

from kvdepot.vllm import compat


def store_dropped_ends(scheduler: Any) -> None:
    """Have vLLM's `scheduler` side store the windows of hits that end one block earlier, too."""
    alignment = scheduler.config.alignment_tokens
    drafts = any(group.is_eagle_group for group in scheduler.config.kv_group_configs)
    if not drafts or alignment is None or not compat.has_windows(scheduler):
        return

    def with_earlier(ends: tuple[int, ...]) -> tuple[int, ...]:
        return ends + tuple(end - alignment for end in ends if end >= alignment)

    compat.store_for(scheduler, with_earlier)
