/* Prints where the fields of the structs lie, and what the names stand for. */
#include <kvdepot.h>
#include <stdio.h>

#define SIZE(type) printf(#type " %zu\n", sizeof(type))
#define AT(type, field) printf(#type "." #field " %zu\n", offsetof(type, field))
#define IS(name) printf(#name " %llu\n", (unsigned long long)(name))

int main(void) {
    SIZE(kvd_option); AT(kvd_option, value);
    SIZE(kvd_buffer); AT(kvd_buffer, len);
    SIZE(kvd_block); AT(kvd_block, pieces_len);
    SIZE(kvd_key);
    SIZE(kvd_space); AT(kvd_space, model); AT(kvd_space, dtype); AT(kvd_space, block_tokens);
    AT(kvd_space, weights); AT(kvd_space, layout); AT(kvd_space, group); AT(kvd_space, world);
    AT(kvd_space, hash); AT(kvd_space, salt);
    SIZE(kvd_run); AT(kvd_run, end);
    SIZE(kvd_object); AT(kvd_object, bytes);
    SIZE(kvd_checkpoint); AT(kvd_checkpoint, tokens); AT(kvd_checkpoint, tokens_len);
    AT(kvd_checkpoint, text); AT(kvd_checkpoint, text_len); AT(kvd_checkpoint, objects);
    AT(kvd_checkpoint, objects_len); AT(kvd_checkpoint, note); AT(kvd_checkpoint, created);
    AT(kvd_checkpoint, reason); AT(kvd_checkpoint, context_tokens); AT(kvd_checkpoint, exact);
    AT(kvd_checkpoint, reserved);
    SIZE(kvd_saved); AT(kvd_saved, cached_tokens); AT(kvd_saved, cache_write_tokens);
    AT(kvd_saved, bytes_written); AT(kvd_saved, id);
    SIZE(kvd_piece); AT(kvd_piece, end); AT(kvd_piece, bytes);
    SIZE(kvd_named); AT(kvd_named, bytes);
    SIZE(kvd_found_about); AT(kvd_found_about, id); AT(kvd_found_about, tokens);
    AT(kvd_found_about, tokens_len); AT(kvd_found_about, text); AT(kvd_found_about, text_len);
    AT(kvd_found_about, pieces); AT(kvd_found_about, pieces_len); AT(kvd_found_about, objects);
    AT(kvd_found_about, objects_len); AT(kvd_found_about, note);
    AT(kvd_found_about, context_tokens);
    SIZE(kvd_restored); AT(kvd_restored, cached_tokens); AT(kvd_restored, whole);
    SIZE(kvd_listed); AT(kvd_listed, id); AT(kvd_listed, note); AT(kvd_listed, tokens);
    AT(kvd_listed, text_bytes); AT(kvd_listed, bytes); AT(kvd_listed, created);
    AT(kvd_listed, reason); AT(kvd_listed, bad);
    SIZE(kvd_checked); AT(kvd_checked, blocks); AT(kvd_checked, bytes); AT(kvd_checked, missing);
    SIZE(kvd_policy_settings); AT(kvd_policy_settings, disk_space);
    AT(kvd_policy_settings, min_tokens); AT(kvd_policy_settings, cold_max_tokens);
    AT(kvd_policy_settings, continued_interval_tokens);
    AT(kvd_policy_settings, boundary_trim_tokens);
    AT(kvd_policy_settings, boundary_align_tokens); AT(kvd_policy_settings, write_budget_hour);
    AT(kvd_policy_settings, write_budget_day); AT(kvd_policy_settings, fixed_bytes);
    AT(kvd_policy_settings, token_bytes); AT(kvd_policy_settings, saves_prefixes);
    AT(kvd_policy_settings, writes_whole);
    SIZE(kvd_answer); AT(kvd_answer, action); AT(kvd_answer, reason); AT(kvd_answer, save);
    AT(kvd_answer, tokens); AT(kvd_answer, base); AT(kvd_answer, bytes);
    AT(kvd_answer, declined);
    SIZE(kvd_request); AT(kvd_request, reserved); AT(kvd_request, local);
    AT(kvd_request, remote); AT(kvd_request, offset); AT(kvd_request, len);
    SIZE(kvd_remote_about); AT(kvd_remote_about, len); AT(kvd_remote_about, lasts_ms);
    AT(kvd_remote_about, rights); AT(kvd_remote_about, path);
    SIZE(kvd_llama_about); AT(kvd_llama_about, tokens); AT(kvd_llama_about, state_len);
    AT(kvd_llama_about, rest); AT(kvd_llama_about, rest_len); AT(kvd_llama_about, token_len);
    AT(kvd_llama_about, pieces_len); AT(kvd_llama_about, sequence); AT(kvd_llama_about, layers);
    AT(kvd_llama_about, transposed);
    SIZE(kvd_place); AT(kvd_place, placement); AT(kvd_place, placement_len); AT(kvd_place, tier);
    AT(kvd_place, bytes); AT(kvd_place, key);
    SIZE(kvd_placement); AT(kvd_placement, len);
    SIZE(kvd_sum);
    SIZE(kvd_entry); AT(kvd_entry, id); AT(kvd_entry, parent); AT(kvd_entry, tokens);
    AT(kvd_entry, bytes); AT(kvd_entry, hits); AT(kvd_entry, used_ms); AT(kvd_entry, reason);
    AT(kvd_entry, pins);
    SIZE(kvd_status);
    IS(KVD_VERSION); IS(KVD_STATUS_BUG); IS(KVD_STATUS_NOT_WHOLE); IS(KVD_STATUS_ABORTED);
    IS(KVD_OUTCOME_OTHER); IS(KVD_OUTCOME_DECLINED); IS(KVD_ID_LEN); IS(KVD_GET_PREFIX);
    IS(KVD_GET_STAGED);
    IS(KVD_TRANSFER_CLOSED); IS(KVD_DIGEST_LEN); IS(KVD_PIN_PREFIX); IS(KVD_RESERVE_PREFIX);
    IS(KVD_RESERVE_STRICT);
    return 0;
}
