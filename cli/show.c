/* Output: any message as JSON, tables for people, numbers and ages. */
#include "cli/cli.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "proto/json.h"

const char *mu_cli_enum(const ProtobufCEnumDescriptor *descriptor, int value)
{
    static char texts[4][MU_JSON_WORD_SIZE]; /* a few may be in use in one printf */
    static int next;
    return mu_json_enum(descriptor, value, texts[next++ % 4]);
}

void mu_cli_print_json(const ProtobufCMessage *message, bool one_line)
{
    char *text = mu_json_of(message, one_line);
    MU_ASSERT(text);
    puts(text);
    fflush(stdout);
    free(text);
}

/* ---- tables ---- */

struct mu_cli_table {
    int columns, count, capacity;
    char **cells;
};

struct mu_cli_table *mu_cli_table_new(int columns)
{
    struct mu_cli_table *table = calloc(1, sizeof *table);
    MU_ASSERT(table);
    table->columns = columns;
    return table;
}

void mu_cli_table_add(struct mu_cli_table *table, const char *fmt, ...)
{
    if (table->count == table->capacity) {
        table->capacity = table->capacity ? 2 * table->capacity : 64;
        table->cells = realloc(table->cells, (size_t)table->capacity * sizeof table->cells[0]);
        MU_ASSERT(table->cells);
    }
    va_list args;
    va_start(args, fmt);
    MU_ASSERT(vasprintf(&table->cells[table->count++], fmt, args) >= 0);
    va_end(args);
}

static void print_table(const struct mu_cli_table *table)
{
    for (int row = 0; row * table->columns < table->count; row++) {
        for (int column = 0; column < table->columns; column++) {
            size_t width = 0;
            for (int i = column; i < table->count; i += table->columns) {
                size_t length = strlen(table->cells[i]);
                width = length > width ? length : width;
            }
            const char *cell = table->cells[row * table->columns + column];
            if (column + 1 == table->columns)
                printf("%s\n", cell);
            else
                printf("%-*s  ", (int)width, cell);
        }
    }
}

void mu_cli_table_end(struct mu_cli_table *table, int code)
{
    if (!table)
        return;
    if (code == MU_EXIT_OK)
        print_table(table);
    for (int i = 0; i < table->count; i++)
        free(table->cells[i]);
    free(table->cells);
    free(table);
}

void mu_cli_table_print_free(struct mu_cli_table *table)
{
    mu_cli_table_end(table, MU_EXIT_OK);
}

void mu_cli_count(double value, char out[16])
{
    static const char *const units[] = {"", "k", "M", "G", "T", "P"};
    int unit = 0;
    for (; value >= 1000 && unit < 5; unit++)
        value /= 1000;
    snprintf(out, 16, unit == 0 || value >= 100 ? "%.0f%s" : value >= 10 ? "%.1f%s" : "%.2f%s", value, units[unit]);
}

void mu_cli_bytes(uint64_t bytes, char out[16])
{
    char count[16];
    mu_cli_count((double)bytes, count);
    snprintf(out, 16, "%.13sB", count);
}

void mu_cli_age(uint64_t wall_us, char out[16])
{
    uint64_t now = mu_clock_wall_us();
    uint64_t seconds = wall_us == 0 || wall_us > now ? 0 : (now - wall_us) / 1000000;
    if (wall_us == 0)
        snprintf(out, 16, "-");
    else if (seconds < 120)
        snprintf(out, 16, "%llus", (unsigned long long)seconds);
    else if (seconds < 7200)
        snprintf(out, 16, "%llum", (unsigned long long)(seconds / 60));
    else if (seconds < 172800)
        snprintf(out, 16, "%lluh", (unsigned long long)(seconds / 3600));
    else
        snprintf(out, 16, "%llud", (unsigned long long)(seconds / 86400));
}

void mu_cli_layout(const Muster__V1__Layout *layout, char out[MU_CLI_LAYOUT_SIZE])
{
    char degrees[32], idle[20] = "";
    if (!layout) {
        snprintf(out, MU_CLI_LAYOUT_SIZE, "-");
        return;
    }
    if (layout->tp * layout->pp > 1)
        snprintf(degrees, sizeof degrees, "tp%u pp%u dp%u", layout->tp, layout->pp, layout->dp);
    else
        snprintf(degrees, sizeof degrees, "dp%u", layout->dp);
    if (layout->idle)
        snprintf(idle, sizeof idle, " +%u idle", layout->idle);
    snprintf(out, MU_CLI_LAYOUT_SIZE, "%s%s%s%s", degrees, layout->sharded ? " sharded" : "",
             layout->buddy_shift ? " buddies" : "", idle);
}
