/* Shared by the commands of the program: threads, and the fake driver as loaded by the program under test. */
#ifndef RECFUSE_TESTS_PROGRAM_H
#define RECFUSE_TESTS_PROGRAM_H

#include "fake_cuda.h"

enum { THREADS = 16, NO_COMMAND = 2 };

typedef struct command {
    const char *name;
    int arguments;
    void (*run)(char **arguments);
} command;

extern const command fused_commands[]; /* of test_fused.c */
extern const int n_fused_commands;
extern const command backward_commands[]; /* of test_backward.c */
extern const int n_backward_commands;
extern const command ikbo_commands[]; /* of test_ikbo_linear.c */
extern const int n_ikbo_commands;
extern const command columns_commands[]; /* of test_columns.c */
extern const int n_columns_commands;
extern const command driver_commands[]; /* of test_driver.c */
extern const int n_driver_commands;
extern const command staging_commands[]; /* of test_staging.c */
extern const int n_staging_commands;

/* Runs the command that argv names. Returns the exit status, or NO_COMMAND for an unknown name. */
int command_run(const command *commands, int n_commands, int argc, char **argv);

/* On THREADS threads at once. */
void run_threads(void *(*body)(void *), void *argument);

/* The functions of fake_cuda.h in the loaded library. */
int driver_calls(const char *name);
int driver_live(void);
int context_depth(void);
rf__cu_stream capturing_stream(void);
void driver_hook(const char *name, void (*run)(void));
void driver_watch(void);
void driver_busy(int busy);
const fake_launch *driver_last_launch(void);
const fake_tensor_map *driver_last_tensor_map(void);
void *driver_symbol(const char *name);

#endif
