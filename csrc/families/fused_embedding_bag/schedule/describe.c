/* The data of features for mappings, computed once for all batches. */
#include <inttypes.h>
#include <stdlib.h>

#include "families/fused_embedding_bag/check_fused.h"
#include "families/fused_embedding_bag/schedule/fused_schedule.h"

static uint64_t hash_fields(uint64_t hash, const int32_t *fields, size_t bytes) {
    for (size_t i = 0; i < bytes / sizeof *fields; i++) hash = (hash ^ (uint32_t)fields[i]) * 0x100000001b3u;
    return hash ^ hash >> 32;
}

/* Of classes, of the classes of features, and of their widths: mappings with equal signatures fit each
 * other's calls. */
static int32_t signature_of(const rf__fused_feature *features, int64_t n_features,
                            const rf__fused_classes *classes) {
    uint64_t hash = hash_fields((uint64_t)classes->count, (const int32_t *)classes->of,
                                (size_t)classes->count * sizeof classes->of[0]);
    for (int64_t f = 0; f < n_features; f++) {
        const int32_t wide[] = {features[f].shape.columns, features[f].shape.slices};
        hash = hash_fields(hash, wide, sizeof wide);
        hash = hash_fields(hash, features[f].classes, sizeof features[f].classes);
        hash = hash_fields(hash, features[f].classes_of_few, sizeof features[f].classes_of_few);
        hash = hash_fields(hash, features[f].classes_staged, sizeof features[f].classes_staged);
    }
    return (int32_t)(hash & 0x7fffffff);
}

rf_status rf__fused_describe(const rf_fused_embedding_bag_params *params, const rf_fused_schedule *schedules,
                             rf__fused_described **described) {
    rf_status status = RF_OK;
    const size_t n = (size_t)params->n_features;
    rf__fused_described *created = NULL;
    RF_TRY(rf__fused_check_limits(params));
    RF_TRY(rf__check_fused_features(params));
    created = calloc(1, sizeof *created + n * sizeof created->features[0]);
    if (created == NULL) {
        status = rf__fail(RF_ERR_MEMORY, "no memory to map %zu features", n);
        goto out;
    }
    RF_TRY(rf__fused_features(params, schedules, 1, &created->classes, created->features));
    created->input = (rf__fused_mappable){
        .features = created->features,
        .n_features = params->n_features,
        .classes = &created->classes,
        .signature = signature_of(created->features, params->n_features, &created->classes)};
out:
    if (status != RF_OK) {
        free(created);
        created = NULL;
    }
    *described = created;
    return status;
}
