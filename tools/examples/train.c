/* train.c: trains a small ResNet on the bundled handwritten digits and evaluates it.
 *   cc train.c $(pkg-config --cflags --libs dnnrun) -o train
 *   ./train .../share/dnnrun/data/digits.tar:train .../share/dnnrun/data/digits.tar:test */
#include <dnnrun.h>

#define TRY(call)                                                                                  \
    if ((call) != DNR_OK)                                                                          \
    return fprintf(stderr, "%s\n  %s\n", dnr_last_error()->what, dnr_last_error()->remedy), 1

int main(int argc, char **argv)
{
    dnr_device *dev;
    dnr_source *train, *test;
    TRY(dnr_device_open("auto", &dev));
    TRY(dnr_source_open(argc > 1 ? argv[1] : "digits.tar:train", NULL, &train));
    TRY(dnr_source_open(argc > 2 ? argv[2] : "digits.tar:test", NULL, &test));

    const int64_t n = dnr_source_count(train), batch = 64, steps = n * 8 / batch; /* 8 epochs */
    dnr_trainer_opts opts = {.batch = batch, .image = 8, .epoch_samples = n};
    opts.total_samples = steps * batch;
    opts.model = (dnr_model_opts){.name = "resnet8", .classes = dnr_source_classes(train)};
    opts.optim = (dnr_optim_opts){.lr = 0.1, .momentum = 0.9, .schedule = DNR_SCHEDULE_COSINE};
    dnr_trainer *t;
    TRY(dnr_trainer_create(dev, &opts, &t));
    dnr_loader *feed, *check;
    dnr_loader_opts pass = {.batch = batch, .image = 8}, stream = pass;
    stream.train = stream.shuffle = true;
    TRY(dnr_loader_open(train, dev, &stream, &feed));
    TRY(dnr_loader_open(test, dev, &pass, &check));

    dnr_metrics m;
    dnr_eval_result r;
    for (int64_t i = 0; i < steps; i++)
        TRY(dnr_trainer_step(t, feed, &m));
    TRY(dnr_trainer_eval(t, check, &r));
    printf("%lld of %lld right\n", (long long)r.correct1, (long long)r.images);
    dnr_loader_close(feed), dnr_loader_close(check), dnr_trainer_destroy(t);
    dnr_source_close(train), dnr_source_close(test), dnr_device_close(dev);
}
