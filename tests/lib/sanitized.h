/* Under sanitizers everything takes about ten times as long: sweeps look at a sample then, of each kind some. */
#ifndef MU_TESTS_SANITIZED_H
#define MU_TESTS_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

#endif
