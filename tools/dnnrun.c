/* dnnrun.c: the tool: finds the command, prints the error. */
#include "screen.h"
#include "tool.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static dnr_status cmd_help(int argc, char **argv, dnr_error *err);

static const tool_command commands[] = {
    {"train", "train a model", cmd_train},
    {"eval", "accuracy of a trained model on validation pictures", cmd_eval},
    {"predict", "what a trained model sees in pictures", cmd_predict},
    {"report", "runs as one page: curves, memory map, cfg", cmd_report},
    {"plan", "what a training step runs, and where it lies in memory", cmd_plan},
    {"tune", "time the convolutions of a run ahead of it", cmd_tune},
    {"bench", "speed and memory of training and inference, beside PyTorch's too", cmd_bench},
    {"version", "versions of dnnrun, its libraries and back ends", cmd_version},
    {"help", NULL, cmd_help},
    {"config-doc", NULL, cmd_config_doc},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void usage(FILE *out)
{
    fputs(
        "dnnrun trains residual networks (ResNets) on pictures.\n"
        "\n"
        "  dnnrun train quickstart.cfg                   train on the bundled handwritten digits\n"
        "  dnnrun train resnet50.cfg data.train=train data.val=val\n"
        "  dnnrun eval runs/quickstart-20250131-120000   its accuracy\n"
        "  dnnrun plan resnet50.cfg                      what a step runs\n"
        "\n"
        "Commands:\n",
        out);
    for (int i = 0; i < N_COMMANDS; i++)
        if (commands[i].summary)
            fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fputs("\ndnnrun COMMAND --help says more. Exit codes: 0 done, 1 failed, 2 wrong usage or cfg, "
          "3 data, 4 memory,\n"
          "5 a stall or a lost rank, 6 device or library missing, 7 disk full or unwritable, 75 "
          "saved and "
          "stopped.\n",
          out);
}

static const tool_command *find_command(const char *name, dnr_error *err)
{
    const char *names[N_COMMANDS];
    int n = 0;
    for (int i = 0; i < N_COMMANDS; i++) {
        if (!strcmp(commands[i].name, name))
            return &commands[i];
        if (commands[i].summary)
            names[n++] = commands[i].name;
    }
    tool_fail(err, DNR_EUSAGE, "command line", "there is no command %.200s", name);
    const char *near = tool_nearest(name, names, n);
    if (near)
        tool_remedy(err, "did you mean dnnrun %s?", near);
    else
        tool_remedy(err, "dnnrun --help lists the commands");
    return NULL;
}

/* dnnrun help [COMMAND] */
static dnr_status cmd_help(int argc, char **argv, dnr_error *err)
{
    if (argc < 2) {
        usage(stdout);
        return DNR_OK;
    }
    char option[] = "--help", *args[] = {argv[1], option, NULL};
    const tool_command *c = find_command(argv[1], err);
    if (!c)
        return err->status;
    if (c->run == cmd_help)
        return cmd_help(1, args, err);
    return c->run(2, args, err);
}

static dnr_status dispatch(int argc, char **argv, dnr_error *err)
{
    if (argc < 2) {
        usage(stderr);
        tool_fail(err, DNR_EUSAGE, "command line", "no command given");
        return tool_remedy(err, "begin with dnnrun train quickstart.cfg");
    }
    if (!strcmp(argv[1], "--version")) {
        printf("dnnrun %s\n", dnr_version());
        return DNR_OK;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        usage(stdout);
        return DNR_OK;
    }
    const tool_command *c = find_command(argv[1], err);
    return c ? c->run(argc - 1, argv + 1, err) : err->status;
}

/* OpenMP's threads wait for work by spinning, for some 5 ms by default: time lost to whoever shares the CPU, and where
 * a thread has lost its CPU, to us: all others spin until it is back. 0.1 ms spans the gaps between a step's ops. The
 * CPU back end loads OpenMP, which then reads this. */
static void bound_spinning(void)
{
    if (!getenv("OMP_WAIT_POLICY"))
        setenv("GOMP_SPINCOUNT", "10000", 0);
}

/* A closed standard stream's number would go to the next file opened, and what is printed into that file. */
static void open_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            return;
}

int main(int argc, char **argv)
{
    dnr_error err = {0};
    open_streams();
    bound_spinning();
    signal(SIGXFSZ, SIG_IGN); /* a file beyond ulimit -f is an error of the write, which says so */
    dnr_set_log(screen_log, NULL);
    dnr_status st = dispatch(argc, argv, &err);
    if (st == DNR_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        st = tool_fail(&err, DNR_EDISK, "standard output", "the output could not be written");
        tool_remedy(&err, "free some disk space, or keep the reader of the pipe running");
    }
    if (st != DNR_OK && st != DNR_STOPPED) {
        screen_end();
        screen_last_words(&err);
    }
    return (int)st;
}
