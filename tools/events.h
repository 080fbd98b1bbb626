/* events.h: TensorBoard's event files: records framed as TFRecord, each an Event message of tensorflow/event.proto, of
 * which only scalars are written. */
#ifndef EVENTS_H
#define EVENTS_H

#include <stdint.h>
#include <stdio.h>

struct json_t;

/* Makes FOLDER/events.out.tfevents.<time>.<host>.<pid>. `step` >= 0: events of later steps in older files are void, as
 * after a resume. NULL, with errno, where it cannot. */
FILE *events_open(const char *folder, int64_t step);
/* The numbers of a record of metrics.jsonl, at its step: "train/loss", "eval/top1" …; flushed. 0, or −1 with errno. */
int events_write(FILE *f, const struct json_t *record);

#endif
