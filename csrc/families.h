/* The list of families, from which the core knows them. To add a family, add its folder and a line at the end:
 * operators have numbers in this order, and a line before others changes the machine code of their kernels.
 *
 * The header of a family, families/X/X_family.h, has entries of the macros below, one a line. A reader defines the macros
 * that it needs and includes this file, which drops the other entries and undefines all macros. */
#ifndef RF__TORCH_OPERATOR
/* torch.ops.recfuse.<name>, defined by rf__torch_<name> in a file of the folder torch/. */
#define RF__TORCH_OPERATOR(name)
#endif
#ifndef RF__PYTHON_FUNCTION
/* recfuse._C.<name>, defined by RF__PY_METHOD in a file of the folder python/. */
#define RF__PYTHON_FUNCTION(name)
#endif
#ifndef RF__CODES
/* recfuse._C.codes()[<name>]: the texts of a list of the public headers, RF_X_LIST. */
#define RF__CODES(name, list)
#endif
#ifndef RF__RECORD
/* recfuse._C.records()[<name>]: the fields of a record in order, from a list RF_X_FIELDS. */
#define RF__RECORD(name, list)
#endif
#ifndef RF__CHECKED_OPERATOR
/* RF_OPERATOR_<name>: an operator whose kernels report bad contents, by its name in messages. Kernels include this list, so a
 * change of it compiles all kernels anew. */
#define RF__CHECKED_OPERATOR(name)
#endif
#ifndef RF__CHECKED_ARGUMENT
/* RF_ARGUMENT_<name>: an argument whose contents kernels check. Its name in messages; RF_RULE_<rule>; RF_OWNER_<owner>; the
 * noun that the limit of an index counts, or the end of a range; the meaning of a limit of 0. */
#define RF__CHECKED_ARGUMENT(name, text, rule, owner, counted, none)
#endif

#include "families/embedding_bag/embedding_bag_family.h"
#include "families/pin_rows/pin_rows_family.h"
#include "families/fused_embedding_bag/fused_embedding_bag_family.h"
#include "families/fused_backward/fused_backward_family.h"
#include "families/ikbo_linear/ikbo_linear_family.h"
#include "families/ikbo_attention/ikbo_attention_family.h"
#include "families/embedding_columns/embedding_columns_family.h"
#include "families/fused_embedding/fused_embedding_family.h"

#undef RF__TORCH_OPERATOR
#undef RF__PYTHON_FUNCTION
#undef RF__CODES
#undef RF__RECORD
#undef RF__CHECKED_OPERATOR
#undef RF__CHECKED_ARGUMENT
