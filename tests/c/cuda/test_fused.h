/* Commands of test_fused_map.c, which test_fused.c lists. */
#ifndef RECFUSE_TESTS_TEST_FUSED_H
#define RECFUSE_TESTS_TEST_FUSED_H

void fused_map(char **arguments);
void fused_map_bad(char **arguments);

#endif
