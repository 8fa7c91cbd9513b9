/* Programs that were checked before, with inputs and buffers of the same form: calls of a model differ only
 * in contents, and checking a thousand columns takes longer than a GPU needs to compute them. */
#include "families/embedding_columns/program/columns_program.h"

#include <stdatomic.h>

#include "families/embedding_columns/device/column_values.h"

enum { SLOTS = 64, LANES = 8 };

/* Digests of valid calls; 0: empty. Each is one word, so that atomic words need no lock; overwriting one
 * costs one more check. */
static _Atomic uint64_t checked[SLOTS];

/* Every word changes its lane for any values of the others, because odd factors and exclusive or are
 * invertible; lanes allow eight products in flight. */
static void hash_words(uint64_t lanes[LANES], const void *data, int64_t bytes) {
    const unsigned char *from = data;
    int64_t at = 0;
    for (; bytes - at >= LANES * 8; at += LANES * 8) {
        uint64_t words[LANES];
        memcpy(words, from + at, sizeof words);
        for (int i = 0; i < LANES; i++) {
            lanes[i] = (lanes[i] ^ words[i]) * RF_XXH64_1;
            lanes[i] ^= lanes[i] >> 32;
        }
    }
    for (; at < bytes; at += 8) { /* all inputs are whole words */
        uint64_t word;
        memcpy(&word, from + at, sizeof word);
        lanes[0] = (lanes[0] ^ word) * RF_XXH64_1;
        lanes[0] ^= lanes[0] >> 32;
    }
}

static void hash_word(uint64_t lanes[LANES], uint64_t word) { hash_words(lanes, &word, sizeof word); }

uint64_t rf__columns_digest(const rf_embedding_columns_params *params, bool with_output,
                            const rf__columns *columns) {
    const rf_columns_header *header = columns->header;
    uint64_t lanes[LANES] = {1, 2, 3, 4, 5, 6, 7, 8};
    hash_words(lanes, header, sizeof *header);
    hash_words(lanes, columns->columns, header->n_columns * (int64_t)sizeof *columns->columns);
    hash_words(lanes, columns->sources, header->n_sources * (int64_t)sizeof *columns->sources);
    hash_words(lanes, columns->steps, header->n_steps * (int64_t)sizeof *columns->steps);
    hash_word(lanes, (uint64_t)params->n_inputs << 1 | with_output);
    for (int64_t i = 0; i < params->n_inputs; i++) {
        const rf_column_input *input = &params->inputs[i];
        const bool lacks_weights = input->weights == NULL && input->lookups > 0;
        hash_word(lanes, (uint64_t)input->type << 1 | lacks_weights);
        hash_word(lanes, (uint64_t)input->width);
        hash_word(lanes, (uint64_t)input->features);
    }
    for (int64_t i = 0; with_output && i < params->n_buffers; i++)
        hash_word(lanes, (uint64_t)params->buffers[i].numel);
    uint64_t digest = RF_XXH64_5;
    for (int i = 0; i < LANES; i++) digest = rf_xxh64_word(digest, lanes[i]);
    digest = rf_xxh64_avalanche(digest);
    return digest != 0 ? digest : 1;
}

bool rf__columns_is_checked(uint64_t digest) {
    return atomic_load_explicit(&checked[digest % SLOTS], memory_order_relaxed) == digest;
}

void rf__columns_remember(uint64_t digest) {
    atomic_store_explicit(&checked[digest % SLOTS], digest, memory_order_relaxed);
}
