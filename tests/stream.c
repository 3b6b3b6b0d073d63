/* The triad of STREAM (McCalpin): a = b + s c on all cores, arrays far beyond the caches.
 *
 * Reads a number of passes from each line of stdin and answers with the best seconds of one, so
 * that another benchmark can take turns with it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <omp.h>

int main(int argc, char **argv) {
    long n = atol(argv[1]);
    double *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b), *c = malloc(n * sizeof *c);
    if (argc < 2 || !a || !b || !c)
        return 1;
#pragma omp parallel for
    for (long i = 0; i < n; i++) {
        a[i] = 0.0;
        b[i] = 1.0 + i % 7;
        c[i] = 2.0 + i % 5;
    }
    for (int passes; scanf("%d", &passes) == 1;) {
        double best = 1e30;
        for (int k = 0; k < passes; k++) {
            double start = omp_get_wtime();
#pragma omp parallel for
            for (long i = 0; i < n; i++)
                a[i] = b[i] + 0.4 * c[i];
            double seconds = omp_get_wtime() - start;
            best = seconds < best ? seconds : best;
        }
        printf("%.9f %.3f\n", best, a[n / 2]);
        fflush(stdout);
    }
    return 0;
}
