/* Saves a conversation of llama.cpp, and restores it in another process.
 *
 *     llama_conversation MODEL DEPOT save N      computes and saves N tokens
 *     llama_conversation MODEL DEPOT restore N   restores the saved prefix of N tokens
 *     llama_conversation MODEL DEPOT compute N   computes N tokens without the depot
 *
 * Each command then computes one more token. A fifth argument, "noflash", turns flash attention
 * off. All commands print the number of restored tokens, and a hash of the logits after token
 * N + 1, which is equal for all three.
 */
#include <kvdepot_llama.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int BATCH = 256;

struct Model {
    explicit Model(const char *path) {
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        llama_backend_init();
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = 0;
        model = llama_model_load_from_file(path, params);
        if (model == nullptr)
            throw std::runtime_error(std::string(path) + " cannot be loaded");
    }
    Model(const Model &) = delete;
    ~Model() {
        llama_model_free(model);
        llama_backend_free();
    }
    llama_model *model;
};

struct Context {
    Context(llama_model *model, int tokens, bool flash) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = static_cast<std::uint32_t>(tokens);
        params.n_batch = params.n_ubatch = BATCH;
        params.n_threads = params.n_threads_batch = 1;
        params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                                       : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        context = llama_init_from_model(model, params);
        if (context == nullptr)
            throw std::runtime_error("no context can be made");
    }
    Context(const Context &) = delete;
    ~Context() { llama_free(context); }
    llama_context *context;
};

/* Returns pseudo-random tokens, the same in each process. */
std::vector<llama_token> conversation(const llama_model *model, std::size_t count) {
    const int known = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> tokens;
    for (std::uint32_t i = 0; i < count; i++)
        tokens.push_back(static_cast<llama_token>((i * 2654435761u >> 8) % known));
    return tokens;
}

/* Computes tokens in fixed steps, because other steps can have other last bits. */
void compute(llama_context *context, std::vector<llama_token> &tokens, std::size_t from,
             std::size_t to) {
    while (from < to) {
        const std::size_t end = std::min(to, (from / BATCH + 1) * BATCH);
        const int count = static_cast<int>(end - from);
        if (llama_decode(context, llama_batch_get_one(tokens.data() + from, count)) != 0)
            throw std::runtime_error("llama.cpp cannot decode");
        from = end;
    }
}

std::uint64_t hash_of_logits(llama_context *context) {
    const int count = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    const float *logits = llama_get_logits_ith(context, -1);
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (int i = 0; i < count; i++) {
        std::uint32_t bits;
        std::memcpy(&bits, &logits[i], sizeof bits);
        hash = (hash ^ bits) * 0x100000001b3u;
    }
    return hash;
}

struct Depot {
    explicit Depot(const char *path) {
        const kvd_option options[] = {{"posix.path", path}, {"socket", "off"}};
        kvdepot::check(kvd_depot_open("Posix", options, 2, &depot));
    }
    Depot(const Depot &) = delete;
    ~Depot() { kvd_depot_close(depot); }
    kvd_depot *depot;
};

int run(int count, char **words) {
    const std::string what = words[3];
    const std::size_t wanted = std::strtoul(words[4], nullptr, 10);
    const bool flash = count < 6 || std::string(words[5]) != "noflash";
    const Model model(words[1]);
    const Context held(model.model, static_cast<int>(wanted) + 2 * BATCH, flash);
    llama_context *context = held.context;
    const Depot depot(words[2]);

    /* A state is restored only into a context with the same `space`. The digest of the weights
     * excludes sessions of other weights with the same shape. */
    char weights[KVD_DIGEST_LEN];
    kvdepot::check(kvd_file_digest(words[1], weights));
    kvd_space space;
    KVD_INIT(&space);
    space.model = "example";
    space.dtype = "f16";
    space.block_tokens = BATCH;
    space.weights = weights;
    space.layout = flash ? "llama.cpp f16 flash" : "llama.cpp f16";
    const kvdepot::Llama sessions(depot.depot, space);

    std::vector<llama_token> tokens = conversation(model.model, wanted + 1);
    std::size_t there = 0;
    if (what != "compute")
        there = sessions.restore(context, 0, tokens.data(), wanted);
    compute(context, tokens, there, wanted);
    kvd_saved saved;
    KVD_INIT(&saved);
    if (what == "save")
        saved = sessions.save(context, 0, tokens.data(), wanted);
    compute(context, tokens, wanted, wanted + 1);
    std::printf("restored %zu written %zu logits %016llx\n", there, saved.cache_write_tokens,
                static_cast<unsigned long long>(hash_of_logits(context)));
    return 0;
}

} // namespace

int main(int count, char **words) {
    if (count < 5) {
        std::fprintf(stderr, "usage: %s MODEL DEPOT save|restore|compute N [noflash]\n", words[0]);
        return 2;
    }
    try {
        return run(count, words);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
