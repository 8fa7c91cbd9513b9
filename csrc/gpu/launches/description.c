/* Descriptions: search, creation and release. */
#include "gpu/launches/description.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_DESCRIPTIONS = 256 }; /* per device, without resident ones */
static const int64_t MOST_BYTES = INT64_C(128) << 20; /* of their uploads */

typedef struct rf__described_node {
    struct rf__described_node *next; /* used less recently */
    rf__cuda_store store;
    int32_t users; /* under the lock */
    bool cached, dropped; /* in a list once; taken from it: the last user frees it */
    rf__description description;
    rf__cuda_block block;
    uint64_t number;
    rf__description_make make;
    uint64_t parent;
    size_t bytes[RF__KEY_PARTS];
    bool is_present[RF__KEY_PARTS];
    unsigned char key[]; /* the parts, one after another */
} node;

/* The descriptions of a device, most recently used first. */
typedef struct lists {
    node *cached, *resident;
} lists;

/* Each is guarded by its device's lock. A child of a process with a device has no CUDA and never gets
 * here. */
static lists devices[RF__CUDA_MOST_DEVICES];
static uint64_t numbers; /* atomic */

static node **list_of(const rf__cuda_store *store) {
    lists *of = &devices[store->device->ordinal];
    return store->resident ? &of->resident : &of->cached;
}

/* If all bytes are equal, so are the compared ones: equal keys, the usual case, cost one comparison. */
static bool part_is(const unsigned char *was, const rf__key_part *part) {
    const unsigned char *is = part->data;
    if (part->bytes == 0 || memcmp(was, is, part->bytes) == 0) return true;
    if (part->item_bytes == 0) return false;
    for (size_t at = 0; at < part->bytes; at += part->item_bytes)
        if (memcmp(was + at, is + at, part->compared_bytes) != 0) return false;
    return true;
}

static bool is_for(const node *item, const rf__cuda_store *store, const rf__description_key *key) {
    const unsigned char *at = item->key;
    if (item->make != key->make || item->parent != key->parent || item->store.stream_id != store->stream_id ||
        item->store.allocator.allocate != store->allocator.allocate)
        return false;
    for (int i = 0; i < RF__KEY_PARTS; i++)
        if (item->bytes[i] != key->parts[i].bytes || item->is_present[i] != (key->parts[i].data != NULL))
            return false;
    for (int i = 0; i < RF__KEY_PARTS; i++) {
        if (!part_is(at, &key->parts[i])) return false;
        at += item->bytes[i];
    }
    return true;
}

/* Frees a chain; NULL is fine. */
static void nodes_free(node *item) {
    for (node *next; item != NULL; item = next) {
        next = item->next;
        rf__cuda_block_free(&item->store, &item->block);
        if (item->description.free_data != NULL) item->description.free_data(item->description.data);
        free(item);
    }
}

static rf_status node_new(const rf__cuda_store *store, const rf__description_key *key, const void *problem,
                          bool cached, node **new_node) {
    rf_status status = RF_OK;
    size_t bytes = 0;
    for (int i = 0; i < RF__KEY_PARTS; i++) bytes += key->parts[i].bytes;
    node *item = calloc(1, sizeof *item + bytes);
    RF_FAIL_IF(item == NULL, RF_ERR_MEMORY, "no memory for a call's description");
    item->store = *store;
    item->users = 1;
    item->cached = cached;
    item->number = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
    item->make = key->make;
    item->parent = key->parent;
    unsigned char *at = item->key;
    for (int i = 0; i < RF__KEY_PARTS; i++) {
        item->bytes[i] = key->parts[i].bytes;
        item->is_present[i] = key->parts[i].data != NULL;
        if (item->bytes[i] > 0) memcpy(at, key->parts[i].data, item->bytes[i]);
        at += item->bytes[i];
    }
    RF_TRY(key->make(&store->device->gpu, problem, &item->description));
    RF_TRY(rf__cuda_block_new(store, item->description.upload, (size_t)item->description.upload_bytes, cached,
                              &item->block));
out:
    if (item->description.frees_upload) free((void *)(uintptr_t)item->description.upload);
    item->description.upload = NULL;
    if (status != RF_OK) {
        nodes_free(item);
        item = NULL;
    }
    *new_node = item;
    return status;
}

/* Returns the description, moved to the front of its list and with one more user, or NULL. Under the lock. */
static node *node_find(const rf__cuda_store *store, const rf__description_key *key) {
    node **first = list_of(store);
    for (node **at = first; *at != NULL; at = &(*at)->next) {
        node *item = *at;
        if (!is_for(item, store, key)) continue;
        *at = item->next;
        item->next = *first;
        *first = item;
        item->users++;
        return item;
    }
    return NULL;
}

/* Takes a description from its list; in front of `unused` if it has no user. Under the lock. */
static void node_drop(node **at, node **unused) {
    node *old = *at;
    *at = old->next;
    old->next = NULL;
    old->dropped = true;
    if (old->users > 0) return;
    old->next = *unused;
    *unused = old;
}

/* Drops those that are too many or too large in sum, but for the first. Under the lock. */
static void nodes_trim(node **first, node **unused) {
    int64_t bytes = 0, count = 0;
    for (node **at = first; *at != NULL;) {
        bytes += (*at)->description.upload_bytes;
        if (++count == 1 || (count <= MOST_DESCRIPTIONS && bytes <= MOST_BYTES))
            at = &(*at)->next;
        else
            node_drop(at, unused);
    }
}

static void describe_node(node *item, rf__described *described) {
    *described = (rf__described){
        .data = item->description.data, .upload = item->block.memory, .number = item->number, .node = item};
}

rf_status rf__description_acquire(const rf__cuda_store *store, const rf__description_key *key,
                                  const void *problem, rf__described *described) {
    node *created = NULL, *unused = NULL, *item = NULL;
    memset(described, 0, sizeof *described);
    if (store->device->driver == NULL)
        return rf__description_make_uncached(store, key->make, problem, described);
    rf__cuda_lock(store->device);
    item = node_find(store, key);
    rf__cuda_unlock(store->device);
    if (item == NULL) {
        RF_CHECK(node_new(store, key, problem, true, &created));
        rf__cuda_lock(store->device);
        item = node_find(store, key);
        if (item == NULL) {
            node **first = list_of(store);
            created->next = *first;
            *first = item = created;
            created = NULL;
            if (!store->resident) nodes_trim(first, &unused);
        }
        rf__cuda_unlock(store->device);
        nodes_free(unused);
        nodes_free(created);
    }
    describe_node(item, described);
    return RF_OK;
}

rf_status rf__description_make_uncached(const rf__cuda_store *store, rf__description_make make,
                                        const void *problem, rf__described *described) {
    const rf__description_key key = {.make = make};
    node *created = NULL;
    memset(described, 0, sizeof *described);
    RF_CHECK(node_new(store, &key, problem, false, &created));
    describe_node(created, described);
    return RF_OK;
}

void rf__description_release(rf__described *described) {
    node *item = described->node;
    memset(described, 0, sizeof *described);
    if (item == NULL) return;
    if (!item->cached) {
        nodes_free(item);
        return;
    }
    rf__cuda_lock(item->store.device);
    const bool unused = --item->users == 0 && item->dropped;
    rf__cuda_unlock(item->store.device);
    if (unused) nodes_free(item);
}

void rf__description_forget(const rf__cuda_store *store) {
    node *unused = NULL, **at = &devices[store->device->ordinal].cached;
    rf__cuda_lock(store->device);
    while (*at != NULL) {
        if ((*at)->store.stream_id == store->stream_id && (*at)->store.allocator.allocate == NULL)
            node_drop(at, &unused);
        else
            at = &(*at)->next;
    }
    rf__cuda_unlock(store->device);
    nodes_free(unused);
}
