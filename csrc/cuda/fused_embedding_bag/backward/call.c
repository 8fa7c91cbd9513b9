/* Descriptions of backward calls: added, found, dropped. See call.h. */
#include "cuda/fused_embedding_bag/backward/call.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/validate.h"

enum { MOST_CALLS = 128, MOST_ALIGNMENT = 16 }; /* calls of a device, without resident ones */
static const int64_t MOST_BYTES = INT64_C(64) << 20; /* of their descriptions on the device */

/* The calls of one device; those used last come first. */
typedef struct call_lists {
    rf__backward_call *calls, *resident;
} call_lists;

/* Each under its device's lock. A child of a process with a device has no CUDA and never comes here. */
static call_lists devices[RF__CUDA_MOST_DEVICES];

static rf__backward_call **list_of(const rf__cuda_store *store) {
    call_lists *lists = &devices[store->device->ordinal];
    return store->resident ? &lists->resident : &lists->calls;
}

static int32_t alignment_of(uint64_t address) {
    address |= MOST_ALIGNMENT;
    return (int32_t)(address & -address);
}

/* A number of lookups that many batches share: at most a sixteenth more. Work is cut by it, not bounded. */
static int64_t rounded(int64_t lookups) {
    int64_t step = 1;
    while (lookups / step >= 32) step *= 2;
    return rf__round_up(lookups, step);
}

/* All but pointers to more. */
static rf__backward_call_key key_of(const rf__cuda_store *store, const rf__backward_problem *problem) {
    const rf_fused_backward_params *call = &problem->call;
    rf__backward_call_key key = {.stream_id = store->stream_id,
                                 .allocate = (uintptr_t)store->allocator.allocate,
                                 .n_features = call->n_features,
                                 .bags = call->bags,
                                 .lookups = rounded(call->lookups),
                                 .output_dim = call->output_dim,
                                 .n_matrices = problem->n_matrices,
                                 .dtype = (int32_t)problem->dtype,
                                 .grad_dtype = (int32_t)call->grad_dtype,
                                 .grad_alignment = alignment_of((uintptr_t)call->grad),
                                 .emit = problem->emit,
                                 .listed = problem->listed != NULL,
                                 .weighted = call->sample_weights != NULL};
    for (int32_t i = 0; i < problem->n_matrices; i++) {
        const rf_backward_matrix *matrix = &problem->matrices[i];
        key.matrices[i].buffer = problem->buffers[i];
        key.matrices[i].rows = matrix->rows;
        key.matrices[i].dim = matrix->dim;
        key.matrices[i].weight_alignment = alignment_of(matrix->weight);
        key.matrices[i].state_alignment = alignment_of(matrix->states[0] | matrix->states[1]);
    }
    return key;
}

static size_t features_bytes(const rf__backward_problem *problem) {
    return (size_t)problem->call.n_features * sizeof *problem->call.features;
}

static bool is_for(const rf__backward_call *call, const rf__backward_call_key *key,
                   const rf__backward_problem *problem) {
    return memcmp(&call->key, key, sizeof *key) == 0 &&
           memcmp(call->given, problem->call.features, features_bytes(problem)) == 0;
}

/* Frees a chain; NULL is fine. */
static void call_free(rf__backward_call *call) {
    for (rf__backward_call *next; call != NULL; call = next) {
        next = call->next;
        rf__cuda_block_free(&call->store, &call->description);
        rf__cuda_block_free(&call->store, &call->features);
        rf__backward_small_free(&call->plan);
        free(call->described.features);
        free(call->given);
        free(call);
    }
}

/* Puts what was described on the device, and keeps no other copy of it. */
static rf_status upload(rf__backward_call *call) {
    rf_status status = RF_OK;
    const size_t bytes = (size_t)call->key.n_features * sizeof *call->described.features;
    if (call->described.count > 0) {
        RF_TRY(rf__cuda_block_new(&call->store, call->described.features, bytes, true, &call->features));
        call->bytes += (int64_t)bytes;
    }
    if (call->plan.n_features > 0) {
        RF_TRY(rf__cuda_block_new(&call->store, call->plan.description, (size_t)call->plan.description_bytes,
                                  true, &call->description));
        call->bytes += call->plan.description_bytes;
    }
    rf__backward_small_free(&call->plan);
    free(call->described.features);
    call->described.features = NULL;
out:
    return status;
}

static rf_status call_new(const rf__cuda_store *store, const rf__backward_problem *problem,
                          const rf__backward_call_key *key, rf__backward_call **new_call) {
    rf_status status = RF_OK;
    rf__backward_problem typical = *problem;
    rf__backward_call *call = calloc(1, sizeof *call);
    RF_FAIL_IF(call == NULL, RF_ERR_MEMORY, "no memory for a call of %" PRId64 " features", key->n_features);
    call->store = *store;
    call->key = *key;
    call->given = malloc(features_bytes(problem) + 1);
    if (call->given == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory for a call of %" PRId64 " features", key->n_features);
        goto out;
    }
    if (key->n_features > 0) memcpy(call->given, problem->call.features, features_bytes(problem));
    typical.call.lookups = key->lookups;
    RF_TRY(rf__backward_describe(&typical, &call->described));
    RF_TRY(rf__backward_paths(store->device, &typical, &call->described, &call->plan));
    RF_TRY(upload(call));
out:
    if (status != RF_OK) {
        call_free(call);
        call = NULL;
    }
    *new_call = call;
    return status;
}

/* The call for this problem, now the first of its list and with one user more; NULL: there is none. Under the lock. */
static rf__backward_call *call_find(const rf__cuda_store *store, const rf__backward_call_key *key,
                                    const rf__backward_problem *problem) {
    rf__backward_call **first = list_of(store);
    for (rf__backward_call **at = first; *at != NULL; at = &(*at)->next) {
        rf__backward_call *found = *at;
        if (!is_for(found, key, problem)) continue;
        *at = found->next;
        found->next = *first;
        *first = found;
        found->users++;
        return found;
    }
    return NULL;
}

/* Takes those that are too many out of a list, but for the first; in front of `unused` those that nobody uses. Under the
 * lock. */
static void calls_drop(rf__backward_call **first, rf__backward_call **unused) {
    int64_t bytes = 0, count = 0;
    for (rf__backward_call **at = first; *at != NULL;) {
        rf__backward_call *old = *at;
        bytes += old->bytes;
        if (++count == 1 || (count <= MOST_CALLS && bytes <= MOST_BYTES)) {
            at = &old->next;
            continue;
        }
        *at = old->next;
        old->next = NULL;
        old->dropped = true;
        if (old->users > 0) continue;
        old->next = *unused;
        *unused = old;
    }
}

rf_status rf__backward_call_acquire(const rf__cuda_store *store, const rf__backward_problem *problem,
                                    rf__backward_call **call) {
    const rf__backward_call_key key = key_of(store, problem);
    rf__backward_call *own = NULL, *unused = NULL;
    rf__cuda_lock(store->device);
    *call = call_find(store, &key, problem);
    rf__cuda_unlock(store->device);
    if (*call != NULL) return RF_OK;
    RF_CHECK(call_new(store, problem, &key, &own));
    rf__cuda_lock(store->device);
    *call = call_find(store, &key, problem);
    if (*call == NULL) {
        rf__backward_call **first = list_of(store);
        own->next = *first;
        own->users = 1;
        *first = *call = own;
        own = NULL;
        if (!store->resident) calls_drop(first, &unused);
    }
    rf__cuda_unlock(store->device);
    call_free(unused);
    call_free(own);
    return RF_OK;
}

void rf__backward_call_release(rf__backward_call *call) {
    rf__cuda_lock(call->store.device);
    const bool unused = --call->users == 0 && call->dropped;
    rf__cuda_unlock(call->store.device);
    if (unused) call_free(call);
}
