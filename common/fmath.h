/* Elementary functions in double precision whose results are the same on every machine.
 *
 * The C library's exp, log, ... differ between versions and processors in the last bit; these do not: they consist of
 * IEEE 754 additions, multiplications, divisions and fma() in a fixed order (compile with -ffp-contract=off, rounding
 * to nearest, denormals kept). fma() is exact by definition, in hardware or in the library's emulation. Use them
 * wherever a result reaches a job's bits: learning rates, initial weights, bias corrections. Special values behave as
 * in C99 annex F; errno is never set. Pure. */
#ifndef MU_COMMON_FMATH_H
#define MU_COMMON_FMATH_H

/* pi, rounded to double. */
#define MU_PI 0x1.921fb54442d18p+1

/* Largest magnitude that mu_fmath_sin and mu_fmath_cos accept; beyond it they return NaN. */
#define MU_TRIG_MAX 0x1p30

double mu_fmath_exp(double x); /* within 1 ulp */
double mu_fmath_log(double x); /* within 1 ulp */
double mu_fmath_sin(double x); /* within 1 ulp for |x| <= MU_TRIG_MAX */
double mu_fmath_cos(double x); /* within 1 ulp for |x| <= MU_TRIG_MAX */

/* x to the power y by exp(y log x), with the logarithm carried to about 64 bits: within 1 ulp for normal results. A
 * negative x is allowed when y is an integer. */
double mu_fmath_pow(double x, double y);

double mu_fmath_sqrt(double x); /* correctly rounded by the hardware */

#endif
