/* Saves and restores the states of llama.cpp sequences in a depot, by pieces of their tokens. This
 * C++17 header uses kvdepot.h and the public llama.h; programs link only these two libraries.
 * docs/c.md explains how to build them, and crates/capi/examples/llama_conversation.cpp is a
 * complete program.
 *
 * Example: `context` is a llama_context, and `prompt` a std::vector<llama_token>.
 *
 *     kvdepot::Llama sessions(depot, space);
 *     std::size_t restored = sessions.restore(context, 0, prompt.data(), prompt.size() - 1);
 *     // decode prompt[restored] and the later tokens; then save all tokens of the sequence:
 *     sessions.save(context, 0, tokens.data(), tokens.size());
 *
 * Pass all tokens of a prompt except at least the last one to restore(): logits are not part of a
 * state, so that the last token must be decoded.
 *
 * Supported are sequences with the positions 0 to n - 1, of models with attention. Models may also
 * have sliding windows and recurrent layers: each checkpoint stores that part of the state
 * completely. save() rejects purely recurrent models, M-RoPE, and sequences whose cells were
 * shifted or partly removed.
 *
 * Errors are exceptions of type kvdepot::Error.
 */
#ifndef KVDEPOT_LLAMA_HPP
#define KVDEPOT_LLAMA_HPP

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvdepot.h"
#include "llama.h"

namespace kvdepot {

/* An error of a function of kvdepot.h: its kvd_status, and the message of kvd_last_error(). */
class Error : public std::runtime_error {
  public:
    Error(kvd_status status, const std::string &message)
        : std::runtime_error(message), status_(status) {}

    kvd_status status() const noexcept { return status_; }

  private:
    kvd_status status_;
};

/* Throws an Error if `status` is not KVD_STATUS_OK. */
inline void check(kvd_status status) {
    if (status != KVD_STATUS_OK)
        throw Error(status, kvd_last_error());
}

/* A deleter for handles of kvdepot.h. */
template <typename T, kvd_status (*End)(T *)> struct Ender {
    void operator()(T *handle) const noexcept { (void)End(handle); }
};

/* A handle that is ended with its owner. */
template <typename T, kvd_status (*End)(T *)> using Handle = std::unique_ptr<T, Ender<T, End>>;

/* A session whose tokens are a prefix of the tokens of a lookup. */
class Match {
  public:
    explicit Match(kvd_found *found) : found_(found) {
        KVD_INIT(&about_);
        check(kvd_found_info(found, &about_));
    }

    /* Returns the number of tokens of the session. */
    std::size_t tokens() const noexcept { return about_.tokens_len; }
    /* Returns the description of the session, valid as long as this object. */
    const kvd_found_about &about() const noexcept { return about_; }
    const kvd_found *found() const noexcept { return found_.get(); }

  private:
    Handle<kvd_found, kvd_found_free> found_;
    kvd_found_about about_;
};

/* Options of a save. */
struct Saving {
    const char *text = nullptr; /* text of the tokens, for kvd_sessions_lookup_text; optional */
    std::size_t text_len = 0;   /* bytes */
    const char *note = nullptr; /* optional */
    kvd_reason reason = KVD_REASON_ASKED;
    bool exact = false; /* restores return exactly these bits: docs/sessions.md */
};

/* The sessions of a depot for one model. `space` must identify everything that a state depends on:
 * model, weights, types of keys and values, RoPE, LoRA and tokenizer. A state is restored only into
 * a context with the same `space`. space.block_tokens is the number of tokens per piece.
 *
 * Keep the depot open while this object is in use. Several threads may use one object at the same
 * time, each with another context. */
class Llama {
  public:
    /* Opens the sessions. Blocks while it reads which sessions exist. */
    Llama(kvd_depot *depot, const kvd_space &space) {
        kvd_sessions *sessions = nullptr;
        check(kvd_sessions_open(depot, &space, &sessions));
        sessions_.reset(sessions);
    }

    /* Returns at most `most` complete sessions whose tokens are a prefix of `tokens`, the longest
     * first. */
    std::vector<Match> match(const llama_token *tokens, std::size_t tokens_len,
                             std::size_t most = 4) const {
        std::vector<kvd_found *> found(most, nullptr);
        std::size_t count = 0;
        check(kvd_sessions_lookup(sessions_.get(), numbers(tokens), tokens_len, found.data(), most,
                                  &count));
        std::vector<Handle<kvd_found, kvd_found_free>> held;
        for (std::size_t i = 0; i < count; i++)
            held.emplace_back(found[i]);
        std::vector<Match> matches;
        for (auto &one : held)
            matches.emplace_back(one.release());
        return matches;
    }

    /* Restores the longest matching session into `sequence`, and replaces its content. If a session
     * fails verification or llama.cpp rejects it, the next shorter one is tried. Returns the number
     * of restored tokens, or 0 with an empty sequence if no session could be restored. */
    std::size_t restore(llama_context *context, llama_seq_id sequence, const llama_token *tokens,
                        std::size_t tokens_len) const {
        for (const Match &one : match(tokens, tokens_len))
            if (restore(context, sequence, one))
                return one.tokens();
        llama_memory_seq_rm(llama_get_memory(context), sequence, -1, -1);
        return 0;
    }

    /* Restores one session into `sequence`. Returns false if a part is missing or fails
     * verification, or if llama.cpp rejects the state. The sequence is then empty or unchanged. */
    bool restore(llama_context *context, llama_seq_id sequence, const Match &match) const {
        const kvd_found_about &about = match.about();
        const std::size_t shape_at = object(about, SHAPE), rest_at = object(about, REST);
        if (shape_at == about.objects_len)
            throw Error(KVD_STATUS_INPUT, "the session is no state of llama.cpp's");
        const std::size_t rest_len = rest_at < about.objects_len ? about.objects[rest_at].bytes : 0;
        std::vector<std::uint8_t> shape(about.objects[shape_at].bytes);
        const kvd_buffer into = {shape.data(), shape.size()};
        const kvd_block whole = {&into, 1};
        if (!came(kvd_sessions_object(sessions_.get(), match.found(), shape_at, &whole)))
            return false;
        const Layout layout = Layout(shape).resized(about.tokens_len, rest_len, sequence);

        State state(layout.about().state_len);
        check(kvd_llama_head(layout.get(), state.data(), state.size()));
        Rows rows(layout, state);
        for (std::size_t i = 0; i < about.pieces_len; i++)
            rows.add({about.pieces[i].first, about.pieces[i].end});
        std::vector<kvd_buffer> parts(about.objects_len);
        std::vector<kvd_block> objects(about.objects_len);
        for (std::size_t i = 0; i < about.objects_len; i++) {
            parts[i] = i == rest_at ? kvd_buffer{state.data() + layout.about().rest, rest_len}
                                    : kvd_buffer{shape.data(), shape.size()};
            objects[i] = {&parts[i], 1};
        }
        if (!came(kvd_sessions_restore(sessions_.get(), match.found(), rows.blocks(),
                                       about.pieces_len, objects.data(), about.objects_len,
                                       nullptr)))
            return false;
        rows.scatter();
        return llama_state_seq_set_data(context, state.data(), state.size(), sequence) != 0;
    }

    /* Saves the state of `sequence`; `tokens` are all of its tokens. llama.cpp makes one copy of
     * the state, from which only the rows of missing pieces are written. Blocks until the session
     * is complete. */
    kvd_saved save(llama_context *context, llama_seq_id sequence, const llama_token *tokens,
                   std::size_t tokens_len, const Saving &saving = {}) const {
        State state(llama_state_seq_get_size(context, sequence));
        const std::size_t written =
            llama_state_seq_get_data(context, state.data(), state.size(), sequence);
        if (written == 0 || written > state.size())
            throw Error(KVD_STATUS_SYSTEM, "llama.cpp has written no state of the sequence");
        state.shorten(written);
        const Layout layout(state.data(), state.size());
        if (layout.about().tokens != tokens_len)
            throw Error(KVD_STATUS_INPUT, "tokens_len: " + std::to_string(tokens_len) +
                                       " is not allowed; allowed: those of the sequence, " +
                                       std::to_string(layout.about().tokens));
        std::vector<std::uint8_t> shape = layout.shape();
        std::vector<kvd_object> objects;
        objects.push_back({SHAPE, {shape.data(), shape.size()}});
        if (layout.about().rest_len > 0)
            objects.push_back(
                {REST, {state.data() + layout.about().rest, layout.about().rest_len}});
        kvd_checkpoint checkpoint;
        KVD_INIT(&checkpoint);
        checkpoint.tokens = numbers(tokens);
        checkpoint.tokens_len = tokens_len;
        checkpoint.text = reinterpret_cast<const std::uint8_t *>(saving.text);
        checkpoint.text_len = saving.text_len;
        checkpoint.objects = objects.data();
        checkpoint.objects_len = objects.size();
        checkpoint.note = saving.note;
        checkpoint.reason = static_cast<std::uint32_t>(saving.reason);
        checkpoint.context_tokens = llama_n_ctx(context);
        checkpoint.exact = saving.exact ? 1 : 0;
        Rows rows(layout, state);
        kvd_saved saved;
        KVD_INIT(&saved);
        const kvd_status status =
            kvd_sessions_save(sessions_.get(), &checkpoint, Rows::ask, &rows, &saved);
        if (status == KVD_STATUS_ABORTED && rows.failed())
            std::rethrow_exception(rows.failed());
        check(status);
        return saved;
    }

    /* Returns the handle, for the other functions of kvdepot.h. */
    kvd_sessions *get() const noexcept { return sessions_.get(); }

  private:
    static constexpr const char *SHAPE = "llama.shape";
    static constexpr const char *REST = "llama.rest";

    /* The bytes of a state, not initialized. */
    class State {
      public:
        explicit State(std::size_t size) : bytes_(new std::uint8_t[size]), size_(size) {}
        std::uint8_t *data() const noexcept { return bytes_.get(); }
        std::size_t size() const noexcept { return size_; }
        void shorten(std::size_t size) noexcept { size_ = size; }

      private:
        std::unique_ptr<std::uint8_t[]> bytes_;
        std::size_t size_;
    };

    class Layout {
      public:
        Layout(const std::uint8_t *state, std::size_t size) {
            kvd_llama *layout = nullptr;
            check(kvd_llama_open(state, size, &layout));
            own(layout);
        }

        explicit Layout(const std::vector<std::uint8_t> &state)
            : Layout(state.data(), state.size()) {}

        Layout resized(std::size_t tokens, std::size_t rest_len, llama_seq_id sequence) const {
            kvd_llama *layout = nullptr;
            check(kvd_llama_resized(get(), tokens, rest_len, sequence, &layout));
            return Layout(layout);
        }

        /* Returns the state of one token without its rows: the part that all states of a context
         * share. */
        std::vector<std::uint8_t> shape() const {
            const Layout one = resized(1, 0, 0);
            std::vector<std::uint8_t> state(one.about().state_len);
            check(kvd_llama_head(one.get(), state.data(), state.size()));
            return state;
        }

        const kvd_llama_about &about() const noexcept { return about_; }
        const kvd_llama *get() const noexcept { return layout_.get(); }

      private:
        explicit Layout(kvd_llama *layout) { own(layout); }

        void own(kvd_llama *layout) {
            layout_.reset(layout);
            KVD_INIT(&about_);
            check(kvd_llama_info(layout, &about_));
        }

        Handle<kvd_llama, kvd_llama_close> layout_;
        kvd_llama_about about_;
    };

    /* The memory of the rows of runs of tokens: in the state itself, or in a copy if the values are
     * transposed and a run consists of many small buffers. */
    class Rows {
      public:
        Rows(const Layout &layout, const State &state) : layout_(layout), state_(state) {}

        void add(kvd_run run) {
            const kvd_llama_about &about = layout_.about();
            runs_.push_back(run);
            if (about.transposed) {
                const std::size_t bytes = (run.end - run.first) * about.token_len;
                copies_.emplace_back(new std::uint8_t[bytes]);
                pieces_.emplace_back(1, kvd_buffer{copies_.back().get(), bytes});
            } else {
                std::vector<kvd_buffer> lie(about.pieces_len);
                check(kvd_llama_rows(layout_.get(), state_.data(), state_.size(), run, lie.data(),
                                     lie.size(), nullptr));
                pieces_.push_back(std::move(lie));
            }
            blocks_.push_back({pieces_.back().data(), pieces_.back().size()});
        }

        void gather() {
            for (std::size_t i = 0; i < copies_.size(); i++)
                check(kvd_llama_gather(layout_.get(), state_.data(), state_.size(), runs_[i],
                                       copies_[i].get(), pieces_[i][0].len));
        }

        void scatter() {
            for (std::size_t i = 0; i < copies_.size(); i++)
                check(kvd_llama_scatter(layout_.get(), copies_[i].get(), pieces_[i][0].len,
                                        runs_[i], state_.data(), state_.size()));
        }

        const kvd_block *blocks() const noexcept { return blocks_.data(); }
        std::exception_ptr failed() const noexcept { return failed_; }

        /* The kvd_rows_fn of a save. */
        static int ask(void *user, const kvd_run *runs, std::size_t runs_len, kvd_block *blocks) {
            Rows &rows = *static_cast<Rows *>(user);
            try {
                for (std::size_t i = 0; i < runs_len; i++)
                    rows.add(runs[i]);
                rows.gather();
                for (std::size_t i = 0; i < runs_len; i++)
                    blocks[i] = rows.blocks_[i];
                return 0;
            } catch (...) {
                rows.failed_ = std::current_exception();
                return 1;
            }
        }

      private:
        const Layout &layout_;
        const State &state_;
        std::vector<kvd_run> runs_;
        std::vector<std::unique_ptr<std::uint8_t[]>> copies_;
        std::vector<std::vector<kvd_buffer>> pieces_;
        std::vector<kvd_block> blocks_;
        std::exception_ptr failed_;
    };

    static const std::uint32_t *numbers(const llama_token *tokens) noexcept {
        return reinterpret_cast<const std::uint32_t *>(tokens);
    }

    /* Returns the position of the object with this name, or the number of objects. */
    static std::size_t object(const kvd_found_about &about, const char *name) noexcept {
        for (std::size_t i = 0; i < about.objects_len; i++)
            if (std::string(about.objects[i].name) == name)
                return i;
        return about.objects_len;
    }

    /* Returns true if everything was restored. */
    static bool came(kvd_status status) {
        if (status == KVD_STATUS_NOT_WHOLE)
            return false;
        check(status);
        return true;
    }

    Handle<kvd_sessions, kvd_sessions_close> sessions_;
};

} // namespace kvdepot

#endif
