#include "port/job_name.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <string>

#include "base/status.h"

namespace forebay {
namespace {

TEST(JobName, ComesFromTheLauncher) {
  for (const char* name : {"FOREBAY_JOB", "SLURM_JOB_ID", "SLURM_JOB_NAME", "TORCHELASTIC_RUN_ID"})
    unsetenv(name);
  const std::string own = JobName();
  EXPECT_TRUE(own.ends_with(StrCat("-", getpgrp()))) << own;
  EXPECT_EQ(JobName(), own);
  setenv("TORCHELASTIC_RUN_ID", "none", 1);
  EXPECT_EQ(JobName(), own);
  setenv("TORCHELASTIC_RUN_ID", "run-7", 1);
  EXPECT_EQ(JobName(), "run-7");
  setenv("SLURM_JOB_ID", "42", 1);
  EXPECT_EQ(JobName(), "slurm-42");
  setenv("SLURM_JOB_NAME", "resnet", 1);
  EXPECT_EQ(JobName(), "resnet-42");
  setenv("FOREBAY_JOB", "mine\n\xc3\xbc", 1);
  EXPECT_EQ(JobName(), "mine???");
  for (const char* name : {"FOREBAY_JOB", "SLURM_JOB_ID", "SLURM_JOB_NAME", "TORCHELASTIC_RUN_ID"})
    unsetenv(name);
  EXPECT_EQ(CleanJobName(std::string(1000, 'a')).size(), 256u);
}

}  // namespace
}  // namespace forebay
