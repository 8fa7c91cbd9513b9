/* rf__bag_lookups_cpu. */
#include "base/bag_lookups.h"

#include "cpu/pool/pool.h"

void rf__bag_lookups_cpu(const rf__bag_lookups_params *params) {
    for (int64_t i = 0; i < params->lookups; i++) {
        params->row[i] = params->rows;
        params->bag_of[i] = 0;
    }
    for (int64_t bag = 0; bag < params->bags; bag++) {
        const int64_t begin = rf__load_int(params->offsets, params->offset_type, bag);
        const int64_t end = bag + 1 < params->n_offsets
                                ? rf__load_int(params->offsets, params->offset_type, bag + 1)
                                : params->lookups;
        const bool good = begin >= 0 && begin <= end && end <= params->lookups && (bag > 0 || begin == 0);
        int64_t size = 0;
        for (int64_t i = begin; good && i < end; i++) {
            const int64_t index = rf__load_int(params->indices, params->index_type, i);
            if (index < 0 || index >= params->rows || index == params->padding_idx) continue;
            params->row[i] = index;
            params->bag_of[i] = bag;
            size++;
        }
        params->sizes[bag] = size > 0 ? size : 1;
    }
}
