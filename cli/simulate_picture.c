#include "cli/simulate.h"

#include <errno.h>
#include <stdio.h>

enum { WIDTH = 1000, LEFT = 60, TOP = 40, HEIGHT = 240, BAR_TOP = 330, BAR_HEIGHT = 36, TOTAL_HEIGHT = 430, TICKS = 6 };

static const char *const colours[MU_OUTLOOK_CLASSES] = {"#4c9f70", "#c0392b", "#e67e22", "#f1c40f",
                                                        "#9b59b6", "#3498db", "#7f8c8d", "#34495e"};

static double x_of(double day, double days)
{
    return LEFT + day / days * (WIDTH - LEFT - 20);
}

static double y_of(double count, double nodes)
{
    return TOP + HEIGHT * (1 - count / nodes);
}

static void draw_axes(FILE *file, uint32_t nodes, double days)
{
    for (int i = 0; i <= TICKS; i++) {
        double day = days * i / TICKS, count = (double)nodes * i / TICKS;
        fprintf(file, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">day %.3g</text>\n", x_of(day, days),
                TOP + HEIGHT + 18, day);
        fprintf(file, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n", LEFT - 6, y_of(count, nodes) + 4,
                count);
        fprintf(file, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT, WIDTH - 20,
                y_of(count, nodes), y_of(count, nodes));
    }
}

/* Steps up and down; a stop shorter than a pixel still shows as a line. */
static void draw_nodes(FILE *file, const struct mu_outlook *o, uint32_t nodes, double days)
{
    double before = 0;
    fprintf(file, "<polyline fill=\"none\" stroke=\"#2c3e50\" points=\"");
    for (uint32_t i = 0; i < o->point_count; i++) {
        double x = x_of(o->points[i].day, days), y = y_of(o->points[i].nodes, nodes);
        if (i > 0)
            fprintf(file, "%.2f,%.1f ", x, before);
        fprintf(file, "%.2f,%.1f ", x, y);
        before = y;
    }
    fprintf(file, "\"/>\n");
}

static void draw_shares(FILE *file, const struct mu_outlook *o, double days)
{
    double x = LEFT, whole = days * 86400, label = LEFT;
    for (int i = 0; i < MU_OUTLOOK_CLASSES; i++) {
        double share = o->seconds[i] / whole, width = share * (WIDTH - LEFT - 20);
        if (width > 0)
            fprintf(file, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"/>\n", x, BAR_TOP, width,
                    BAR_HEIGHT, colours[i]);
        fprintf(file, "<rect x=\"%.1f\" y=\"%d\" width=\"10\" height=\"10\" fill=\"%s\"/>", label, BAR_TOP + 48,
                colours[i]);
        fprintf(file, "<text x=\"%.1f\" y=\"%d\">%s</text><text x=\"%.1f\" y=\"%d\">%.2f %%</text>\n", label + 14,
                BAR_TOP + 57, mu_outlook_class_names[i], label + 14, BAR_TOP + 74, 100 * share);
        x += width > 0 ? width : 0;
        label += (WIDTH - LEFT - 20) / (double)MU_OUTLOOK_CLASSES;
    }
}

enum mu_status mu_simulate_picture(const char *path, const char *name, const struct mu_outlook *outlook, uint32_t nodes,
                                   double days, struct mu_error *err)
{
    FILE *file = fopen(path, "w");
    if (!file)
        return mu_fail_errno(err, errno, "%s: cannot write the picture", path);
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n<text x=\"%d\" y=\"22\" "
            "font-size=\"15\">",
            WIDTH, TOTAL_HEIGHT, LEFT);
    for (; *name; name++) /* a name may hold anything */
        fprintf(file, (unsigned char)*name < ' ' || *name == '<' || *name == '&' ? "&#%d;" : "%c",
                (unsigned char)*name < ' ' ? '?' : (unsigned char)*name);
    fprintf(file, ": nodes at work, goodput %.2f %%</text>\n", 100 * outlook->goodput);
    draw_axes(file, nodes, days);
    draw_nodes(file, outlook, nodes, days);
    draw_shares(file, outlook, days);
    fprintf(file, "</svg>\n");
    int failed = ferror(file) ? EIO : 0;
    if (fclose(file) != 0 && !failed)
        failed = errno;
    return failed ? mu_fail_errno(err, failed, "%s: cannot write the picture", path) : MU_OK;
}
