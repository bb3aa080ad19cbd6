/* Models from and to other programs' files: no coordinator is needed. */
#include "cli/cli.h"

#include <inttypes.h>
#include <stdio.h>

#include "storage/interchange.h"

#define FORMATS "hf-gpt2, hf-llama or llm.c"

/* The format and the two places, which both commands need. MU_EXIT_OK or a usage error that was printed. */
static int judge(const char *command, const char *format, const char *from_option, const char *from, const char *out,
                 enum mu_interchange_format *ret_format)
{
    if (!format || !from || !out)
        return mu_cli_usage(command, "--format, %s and --out are required", from_option);
    *ret_format = mu_interchange_format_named(format);
    if (*ret_format == MU_INTERCHANGE_COUNT)
        return mu_cli_usage(command, "--format '%s' is not allowed: " FORMATS, format);
    return MU_EXIT_OK;
}

int mu_cmd_export(struct mu_cli *cli, int argc, char **argv)
{
    (void)cli;
    const char *checkpoint = NULL, *format_name = NULL, *out = NULL;
    const struct mu_cli_option options[] = {
        {"--checkpoint", &checkpoint, NULL}, {"--format", &format_name, NULL}, {"--out", &out, NULL}};
    enum mu_interchange_format format;
    struct mu_error err;
    if (mu_cli_parse("export", argc, argv, options, (int)(sizeof options / sizeof options[0]), 0, 0) < 0)
        return MU_EXIT_USAGE;
    int code = judge("export", format_name, "--checkpoint", checkpoint, out, &format);
    if (code != MU_EXIT_OK)
        return code;
    if (mu_interchange_export(checkpoint, format, out, &err) != MU_OK)
        return mu_cli_fail(&err);
    printf("%s: parameters of %s as %s\n", out, checkpoint, format_name);
    return MU_EXIT_OK;
}

int mu_cmd_import(struct mu_cli *cli, int argc, char **argv)
{
    (void)cli;
    const char *from = NULL, *format_name = NULL, *out = NULL, *slices_text = "1";
    const struct mu_cli_option options[] = {{"--from", &from, NULL},
                                            {"--format", &format_name, NULL},
                                            {"--out", &out, NULL},
                                            {"--slices", &slices_text, NULL}};
    enum mu_interchange_format format;
    struct mu_interchange_model model;
    struct mu_error err;
    uint64_t slices;
    char count[16];
    if (mu_cli_parse("import", argc, argv, options, (int)(sizeof options / sizeof options[0]), 0, 0) < 0)
        return MU_EXIT_USAGE;
    int code = judge("import", format_name, "--from", from, out, &format);
    if (code != MU_EXIT_OK)
        return code;
    if (!mu_cli_number("import", "--slices", slices_text, 1, MU_SLICES_MAX, &slices))
        return MU_EXIT_USAGE;
    if (mu_interchange_import(from, format, (uint32_t)slices, out, &model, &err) != MU_OK)
        return mu_cli_fail(&err);
    const struct mu_model_config *c = &model.config;
    mu_cli_count((double)model.parameter_count, count);
    printf("%s: %s parameters; model: {family: %s, layers: %" PRIu32 ", heads: %" PRIu32 ", channels: %" PRIu32
           ", context: %" PRIu32 ", vocab: %" PRIu32,
           out, count, c->family == MU_FAMILY_GPT2 ? "gpt2" : "llama", c->layers, c->heads, c->channels, c->context,
           c->vocab);
    if (c->family == MU_FAMILY_LLAMA)
        printf(", kv_heads: %" PRIu32 ", hidden: %" PRIu32 ", rope_base: %.10g", c->kv_heads, c->hidden, c->rope_base);
    printf("}, parallel: {slices: %" PRIu32 "}\n", c->slices);
    return MU_EXIT_OK;
}
