/* Embedding bags without torch and without Python: pool. Linked only against librecfuse_core.so. */
#include <recfuse.h>
#include <stdio.h>

int main(void) {
    const float weight[3][4] = {{1, 2, 3, 4}, {10, 20, 30, 40}, {100, 200, 300, 400}}; /* [rows, dim] */
    const int64_t indices[] = {0, 2, 1, 1, 0}, offsets[] = {0, 2, 2}; /* bags {0, 2}, {}, {1, 1, 0} */
    float output[3][4];
    rf_embedding_bag_params params = {
        .weight = weight,
        .rows = 3,
        .dim = 4,
        .weight_stride = 4,
        .dtype = RF_FLOAT32,
        .indices = indices,
        .lookups = 5,
        .index_type = RF_INT64,
        .offsets = offsets,
        .bags = 3,
        .offset_type = RF_INT64,
        .check_bounds = true,
        .pooling = RF_SUM,
        .padding_idx = -1,
        .prefetch_distance = -1,
        .output = output,
        .output_stride = 4,
    };
    const rf_status status = rf_embedding_bag_cpu(&params, NULL); /* NULL: on this thread */
    if (status != RF_OK) {
        fprintf(stderr, "%s: %s\n", rf_status_text(status), rf_last_error());
        return 1;
    }
    printf("recfuse %s, %s\n", rf_version(), rf_cpu_isa());
    for (int bag = 0; bag < 3; bag++) {
        for (int column = 0; column < 4; column++) printf("%g ", output[bag][column]);
        printf("\n");
    }

    params.rows = 2; /* so that index 2 is bad: an error says where, and nothing is read out of bounds */
    if (rf_embedding_bag_cpu(&params, NULL) == RF_ERR_INDEX) printf("%s\n", rf_last_error());
    return 0;
}
